"""Prices by the hour, the ledger of reservations and settlements, and budgets.

Calculates with exact decimals and never asks a cloud.
"""
