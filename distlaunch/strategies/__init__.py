"""Distribution strategies, each behind the protocol in `protocol.py`."""
