"""How `experts.balance` finds a placement."""
