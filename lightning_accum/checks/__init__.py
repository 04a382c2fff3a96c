"""What is refused or warned about, and checks of arguments."""
