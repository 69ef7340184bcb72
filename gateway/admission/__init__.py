"""Who may enter: keys in memory, limits, queue bounds."""
