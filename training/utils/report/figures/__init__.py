"""What runs left in their folders, as charts, tables and figures. Plain records."""
