"""The one exception for mistakes that a user can mend.

Scripts turn it into one line and exit code 2 (scripts/console.py); anything else that is raised is
a defect of this project and keeps its traceback.
"""


class UserError(ValueError):
    """Say in one line what was given, what is allowed and what to do."""
