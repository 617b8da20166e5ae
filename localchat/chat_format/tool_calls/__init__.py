"""Tool-call syntaxes of model families: parsing and writing."""
