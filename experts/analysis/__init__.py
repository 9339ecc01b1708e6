"""What loads tell: the report on what was, the plan of what would be."""
