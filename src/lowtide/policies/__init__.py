"""Which codec and which bound a save gets: ordered rules over the defaults of a method."""
