"""What a schedule may have beside F, B and W: a file for each, with its costs and its search."""
