"""What machines cost: prices by the hour, the ledger of reservations and settlements, and budgets.

Decides with exact decimals; asks no cloud.
"""
