"""The partial-allocation auction: proportionally fair allocation, hidden payments, whole GPUs."""
