"""The flags of step 3, their checks, and the settings made from them."""
