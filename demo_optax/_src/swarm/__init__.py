"""Workers that come and go, without a collective, over any object store."""
