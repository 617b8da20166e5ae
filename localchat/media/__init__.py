"""Pictures and recordings: formats, limits and decoding.

Pillow and soundfile are imported when a file is decoded.
"""
