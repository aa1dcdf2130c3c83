"""Other frameworks' rules, to compare with."""
