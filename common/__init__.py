"""What producer and workers share: the format, the store, the ledger, publishing. Knows neither of them."""
