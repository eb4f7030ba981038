"""Colors of figures: those of Okabe and Ito, which people with any color vision can tell apart.

M. Okabe and K. Ito, "Color Universal Design", 2008.
"""

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = PALETTE = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
)
GREY = "#666666"
