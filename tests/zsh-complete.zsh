# What zsh offers for a command line: zsh -f zsh-complete.zsh DIRECTORY-OF-FUNCTIONS LINE
# An interactive zsh on a terminal of its own completes the line; what it adds to the list, it writes to a file.
zmodload zsh/zpty
found=$(mktemp) setup=$(mktemp)
cat >$setup <<END
PROMPT=
unsetopt prompt_sp prompt_cr
fpath=(${(q)1} \$fpath)
autoload -Uz compinit
compinit -u -D
bindkey '^I' complete-word
zstyle ':completion:*' menu no
compadd () {
    if [[ \${@[1,(i)(-|--)]} != *-(O|A|D)\ * ]]; then
        typeset -a hits
        builtin compadd -A hits "\$@"
        print -rl -- \$hits >>$found
    fi
    builtin compadd "\$@"
}
finished () { print -r -- end-of-the-list >>$found; exit }
comppostfuncs=(finished)
print set-up-is-done
END
zpty completer zsh -f -i
zpty -w completer "source $setup"
while zpty -r completer line; do
    [[ $line == *set-up-is-done* ]] && break
done
zpty -w -n completer "$2"$'\t'
while zpty -r completer line; do :; done
grep -v '^$' $found
rm -f $found $setup
