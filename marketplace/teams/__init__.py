"""Teams: people who share an account."""
