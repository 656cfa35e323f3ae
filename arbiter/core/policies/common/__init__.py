"""Orders and the split among tenants: shared by several families of policies."""
