"""The pieces that codecs are made of: memory order, bit packing, bit planes, dither, escapes, membership tests."""
