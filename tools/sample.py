"""Print text that a trained model writes, from the newest whole checkpoint of a run.

    python -m tools.sample --load runs/llama_tiny --prompt "def "
    torchrun --standalone --nproc-per-node 4 -m tools.sample --load runs/llama_512k \\
        --prompt-file book.txt --num-samples 1 --temperature 0
    python -m tools.sample --load runs/chats --chat            # asks for a line, answers, and so on
    python -m tools.sample --load runs/chats --chat --prompt "2 + 2?"

Processes share the prompts (context parallelism), unless flags let them share the matrices or the
layers.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.chat.conversations import NAMED
from data.chat.rows import conversation_of_turns
from data.chat.template import ChatTemplate
from data.chat.turns import Turn
from data.tokenizer import HuggingFaceTokenizer, Tokenizer
from model.generate import DivergedError, Draw
from planner.choice import method_to_read
from runtime.errors import DataError
from runtime.together import from_first, is_first
from tools.common.arguments import at_least, parser_for, positive, refuse_folder
from tools.common.runs import Run, add_begin, add_mesh, mesh_of, open_run
from train.checkpoint.manifest import CheckpointError
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import run_entry


@dataclass(frozen=True)
class Session:
    """A loaded model and the settings to generate text with it; its methods are collective."""

    writer: Writer
    run: Run
    args: argparse.Namespace
    stop: list[int]
    template: ChatTemplate | None

    def write(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return the new tokens of each prompt.

        Raises CheckpointError if the model overflows.
        """
        args = self.args
        try:
            return self.writer.write(
                prompts,
                args.num_tokens,
                stop=self.stop,
                seed=args.seed,
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
            )
        except DivergedError as error:
            raise CheckpointError(
                f"{self.writer.folder} cannot write text, because its training diverged: {error} "
                "with --ckpt-step, or train again with a lower lr"
            ) from error

    def talk(self) -> None:
        """Answer questions from the first rank's terminal, a line each, until the input ends.

        The model sees the whole conversation.
        """
        turns = _system(self.args)
        while True:
            line = from_first(_line)
            if line is None:
                return
            if not line.strip():
                continue
            question = [*turns, {"role": "user", "content": line}]
            try:
                prompt = _question(self.run.tokenizer, self.template, question)
            except DataError as error:
                if is_first():
                    print(f"error: {error}", file=sys.stderr)
                continue

            (ids,) = self.write([prompt])
            text = _continuation(self.run.tokenizer, prompt, ids).strip()
            if is_first():
                print(text, flush=True)
            turns = [*question, {"role": "assistant", "content": text}]

    def sample(self, texts: Sequence[str], text_ids: Sequence[list[int]]) -> None:
        """Continue each text with ``--num-samples`` samples, and print them on the first rank.

        ``text_ids`` are the token ids of the texts.
        """
        args = self.args
        begin = self._begin(text_ids)
        prompts = []
        for ids in text_ids:
            for _ in range(args.num_samples):
                prompts.append([*begin, *ids])

        tokenizer = self.run.tokenizer
        largest = max(map(max, prompts))
        lacking = tokenizer.missing(self.run.config.model.vocabulary, largest)
        if lacking is not None:
            raise DataError(f"a prompt has a token that the model lacks: {lacking}")

        self.writer.check(prompts, args.num_tokens)
        if is_first():
            self._announce(texts, max(map(len, prompts)))

        written = self.write(prompts)
        if not is_first():
            return

        for prompt, ids in zip(prompts, written, strict=True):
            print("-" * 80)
            shown = prompt[len(begin) :]
            if args.chat or args.prompt_file is not None:
                print(_continuation(tokenizer, shown, ids))
            else:  # one call for both parts: a token's text can depend on the token before
                print(tokenizer.detokenize([*shown, *_in_vocabulary(tokenizer, ids)]))

    def _begin(self, text_ids: Sequence[list[int]]) -> list[int]:
        """Return the token ids to put before each text.

        A chat template writes its begin token itself. An empty prompt needs a token: the end token,
        since documents follow it in training.
        """
        begin: tuple[int, ...]
        if self.args.chat:
            begin = ()
        else:
            begin = self.run.begin(self.args.add_bos_token)
        if begin or all(text_ids):
            return list(begin)

        return [self.run.tokenizer.eod]

    def _announce(self, texts: Sequence[str], longest_prompt: int) -> None:
        """Print the run and the prompts, and a note if texts are longer than in training."""
        args = self.args
        prompts = f"{len(texts)} prompts"
        if len(texts) == 1:
            prompts = f"prompt {texts[0]!r:.200}"
        samples = f"{args.num_samples} x {args.num_tokens} tokens"
        print(f"{args.load}, iteration {self.writer.iteration}, {prompts}, {samples}")

        trained = self.run.trained_length
        if args.chat or trained is None:
            return
        if longest_prompt + args.num_tokens > trained:
            print(
                f"note: prompt and new tokens together exceed {trained} tokens, the length of the "
                "sequences that the model was trained on",
                file=sys.stderr,
            )


def main(argv: list[str]) -> None:
    """Open a run, and continue the prompts or answer questions with its model."""
    args = _parse(argv)
    Draw(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    run = open_run(args.load, args.ckpt_step)
    tokenizer = run.tokenizer
    stop_tokens = [_token(tokenizer, text) for text in args.stop]
    stop = list(dict.fromkeys([*run.ends, *stop_tokens]))
    template = run.template(args.chat_template) if args.chat else None

    texts = [] if args.talks else _prompts(args)
    prompts = []
    for text in texts:
        if template is None:
            prompts.append(tokenizer.tokenize(text))
        else:
            turns = [*_system(args), {"role": "user", "content": text}]
            prompts.append(_question(tokenizer, template, turns))

    with opened(args.load, args.ckpt_step, choose=method_to_read, **mesh_of(args)) as writer:
        session = Session(writer, run, args, stop, template)
        if args.talks:
            session.talk()
        else:
            session.sample(texts, prompts)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line, and set the defaults that depend on --chat."""
    parser = parser_for("python -m tools.sample", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group().add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="folder of the run")
    source(
        "--prompt",
        metavar="TEXT",
        help="beginning of the text (default: empty); with --chat the question",
    )
    source("--prompt-file", type=Path, metavar="FILE", help="file with the beginning of the text")
    add("--by-line", action="store_true", help="take each line of the file as a prompt")
    add(
        "--num-samples",
        type=positive,
        metavar="N",
        help="number of texts per prompt (default: 2; with --chat 1)",
    )
    add(
        "--num-tokens",
        type=positive,
        metavar="N",
        help="maximum number of new tokens per text (default: 160; with --chat 1024)",
    )
    add(
        "--temperature",
        type=at_least(0.0),
        default=0.8,
        metavar="T",
        help="divisor of the logits; 0 takes the likeliest token (default: 0.8)",
    )
    add(
        "--top-k",
        type=positive,
        metavar="K",
        default=50,
        help="sample from the K likeliest tokens (default: 50)",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample only from the fewest of these tokens whose probabilities sum to P",
    )
    add(
        "--stop",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="further tokens that end a text, by text or number",
    )
    add("--seed", type=at_least(0), default=1234, metavar="N", help="random seed (default: 1234)")
    add_begin(parser, "the prompts")

    chat = parser.add_argument_group("conversations").add_argument
    chat(
        "--chat",
        action="store_true",
        help=(
            "format the prompt with the chat template and print the answer; "
            "without a prompt, read questions one after the other"
        ),
    )
    chat(
        "--chat-template",
        metavar="FILE|NAME",
        help=(
            "chat template (default: the one of the run's conversations, else the tokenizer's): "
            f"a file, or {', '.join(NAMED)}"
        ),
    )
    chat("--system", metavar="TEXT", help="system message before the first question")
    add_mesh(parser)

    args = parser.parse_args(argv)
    args.talks = args.chat and args.prompt is None and args.prompt_file is None
    if (args.chat_template or args.system) and not args.chat:
        parser.error("--chat-template and --system need --chat")
    if args.talks and args.num_samples not in (None, 1):
        parser.error(
            "--num-samples needs --prompt or --prompt-file; "
            "a conversation continues with one answer"
        )

    if args.by_line and args.prompt_file is None:
        parser.error("--by-line takes the lines of --prompt-file; give --prompt-file FILE")
    args.num_samples = args.num_samples or (1 if args.chat else 2)
    args.num_tokens = args.num_tokens or (1024 if args.chat else 160)
    return args


def _question(
    tokenizer: Tokenizer, template: ChatTemplate | None, turns: Sequence[Turn]
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Raises DataError if a turn's text spells a special token, or if the template fails.
    """
    assert template is not None
    assert isinstance(tokenizer, HuggingFaceTokenizer)  # no other tokenizer has a template
    from_user = [turn for turn in turns if turn["role"] != "assistant"]
    template.refuse_spelled(tokenizer, conversation_of_turns(from_user))
    return tokenizer.tokenize_special(template.render(turns, prompt=True))[0]


def _system(args: argparse.Namespace) -> list[Turn]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _in_vocabulary(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Drop the tokens that pad the model's vocabulary, which have no text."""
    return [token for token in ids if token < tokenizer.vocab_size]


def _continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of new tokens.

    It is cut from the text of prompt and new tokens together, since a token's text can depend on
    the token before it.
    """
    whole = tokenizer.detokenize([*prompt, *_in_vocabulary(tokenizer, ids)])
    return whole[len(tokenizer.detokenize(prompt)) :]


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return the texts to continue."""
    if args.prompt_file is None:
        return [args.prompt or ""]

    refuse_folder("--prompt-file", args.prompt_file)
    try:
        text = args.prompt_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"--prompt-file is {args.prompt_file}, but that file does not exist; check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{args.prompt_file} is not UTF-8 ({error}); convert it") from error

    if not args.by_line:
        return [text]

    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise DataError(f"{args.prompt_file} has only empty lines; write one prompt per line")

    return prompts


def _token(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of the token that a number or a text names."""
    if text.isdecimal():
        ids = [int(text)]
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        ids = tokenizer.tokenize_special(text)[0]
    else:
        ids = tokenizer.tokenize(text)

    if len(ids) != 1 or ids[0] >= tokenizer.vocab_size:
        raise ConfigError(
            f"--stop has {text!r}, but that is {ids} and not one token of {tokenizer.path}; name "
            f"each token by its text or by its number, 0 to {tokenizer.vocab_size - 1}"
        )

    return ids[0]


if __name__ == "__main__":
    run_entry(main)
