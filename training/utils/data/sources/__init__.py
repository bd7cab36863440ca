"""Sources of rows: dataset classes and their registry, files and their formats, fingerprints of both."""
