"""From tokens to money: durable intent, settlement, recovery."""
