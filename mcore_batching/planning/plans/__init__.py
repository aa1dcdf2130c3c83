"""Plans: what they hold, their JSON, checks, figures and records, and the memory they take."""
