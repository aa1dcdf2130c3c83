"""Puts this folder on the path: `planning_cases` is shared by the tests in several folders."""
