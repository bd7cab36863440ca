"""The report of a run: the files in its folder as charts and tables in one HTML file. Imports no torch."""
