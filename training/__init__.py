"""Train drafters on a frozen target."""
