"""Bytes at rest: storage, sources, packing, index, verification and the pure sample order. Never imports torch.

Each of its folders imports only those to its left: storage, images < sources < packing < adoption, checking, card.
"""
