"""Who holds which part of which weight, who sends it to whom, and how it is proved."""
