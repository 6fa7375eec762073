"""Byte streams by asyncio's own transports, for protocols that have a core without I/O.

``dialing`` connects, ``accepting`` listens, ``byte_transport`` moves the bytes. Relink and
ReactiveSocket are served so.
"""
