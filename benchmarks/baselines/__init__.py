"""Methods of the sources that the engines supersede, with which tests compare; they are not installed."""
