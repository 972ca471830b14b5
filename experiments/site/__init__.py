"""One static site from all results: designs side by side, claims, experiments."""
