"""Customer accounts: opening, topping up, credit."""
