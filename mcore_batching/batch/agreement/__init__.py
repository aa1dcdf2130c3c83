"""Agreements: messages between ranks, so that all act on the same or raise together.

consensus      agreement: one rank's error raised on all, settings compared
figures        numbers that travel with an agreement, each by its name
rank_messages  small messages over all ranks in log2 rounds
_summary       statements of ranks in messages of a fixed size
_differences   the ranks that differ, in words
"""
