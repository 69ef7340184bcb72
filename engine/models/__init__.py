"""Model families: one short file each over shared blocks."""
