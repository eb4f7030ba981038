"""Continue training after ranks have failed."""
