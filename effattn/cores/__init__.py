"""The engines that mechanisms reduce to: what each is told, and its rule of differentiation.

How they compute is in `effattn.xla`, for any device, and `effattn.pallas`, for some.
"""
