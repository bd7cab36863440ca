"""The report of a run: what its folder holds, as charts and tables in one HTML file. Imports no torch."""
