"""The launcher: a root service of one node, which starts tasks as the users who submitted them.

It decides nothing about GPUs. Its whole task is to believe neither the node agent nor the arbiter in one respect: a
program runs as a user only if a gateway has signed that the user wants it. Read `service` first.
"""
