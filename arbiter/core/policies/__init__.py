"""The policies, one package for each family; `arbiter.core.registry` lists them."""
