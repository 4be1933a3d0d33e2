"""One GPU of each kind that kernels are compiled for in the tests."""

from penstock.executor.kernels.card import Card

A100 = Card((8, 0), 108, 163 << 10)
L40S = Card((8, 9), 142, 99 << 10)
H200 = Card((9, 0), 132, 227 << 10)
B200 = Card((10, 0), 148, 227 << 10)
RTX_PRO = Card((12, 0), 188, 99 << 10)
