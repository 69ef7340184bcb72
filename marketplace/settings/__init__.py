"""Settings of the platform that admins change while it runs."""
