"""Selling GPUs of coming slots by price: what a job is worth by when it ends, prices, best schedules (OASiS)."""
