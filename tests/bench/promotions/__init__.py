"""`python -m bench.promotions`: many promotions on one registry, and an operator that is started again among them.

In reading order: `world` (the servers, the models, the promotions, the operator), `writes` (who wrote what, from the
servers' own logs) and `report` (goals, JSON, table).
"""
