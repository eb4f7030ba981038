"""Colors of figures: those of Okabe and Ito, which people with any color vision can tell apart.

M. Okabe and K. Ito, "Color Universal Design", 2008.
"""

BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
GREY = "#666666"
