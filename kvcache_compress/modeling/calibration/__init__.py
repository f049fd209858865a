"""What every method's calibration uses: text, observed attention and the shell of the command."""
