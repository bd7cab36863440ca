"""An endpoint in OpenAI's form for one finished model: requests of many clients are drawn in one batch."""
