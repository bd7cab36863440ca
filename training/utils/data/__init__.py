"""Raw datasets: their contract and registry, datasets of files, fingerprints; rooms on the way to tokenized rows."""
