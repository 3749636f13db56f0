"""Replay: runs training steps by a schedule."""
