"""The files in run folders, as charts, tables and figures. Plain records."""
