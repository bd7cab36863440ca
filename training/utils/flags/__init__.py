"""Settings: dataclasses filled from YAML and the command line, their help page, and the declaration of a step."""
