"""What the command line knows of one of its words."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One word of the command line."""

    summary: str
    second: str
    """What the second word is; empty: there is none."""
    module: str
    """Where `run` is."""
    job: tuple[str, str] = ("", "")
    """Module and name of the job's dataclass."""
    recipes: str = ""
    """Where RECIPES is, name -> function that returns a job, if the second word can be a recipe."""
    loads_torch: bool = False
    """Whether `run` loads torch, which takes seconds: the command says first that it is starting."""
    required: tuple[str, ...] = ()
    """Flags that must have a value, if the job has them. Of several between bars, the first that the job has."""
    usual: tuple[str, ...] = ()
    """Flags that --help shows; --help-all shows the others. Empty: all."""
    is_about_jobs: bool = True
    """Whether its words are those of a job, so that any of the job's flags may follow; otherwise `second` has all."""
    examples: tuple[str, ...] = ()
    """Commands, without the first word `patchline`."""

    @property
    def field(self) -> str:
        """The job's field that the second word sets, if it is not a recipe: `url` of URL|FILE.yaml."""
        return self.second.replace("|", " ").partition(" ")[0].lower()
