# Completion of the tools' options and of their words, for bash. The tools themselves are asked: --help, mlfab-run --settings.
_mlfab() {
  local word=${COMP_WORDS[COMP_CWORD]} option=${COMP_WORDS[COMP_CWORD - 1]} help words
  [[ $word == = ]] && word=
  [[ $option == = ]] && option=${COMP_WORDS[COMP_CWORD - 2]}
  [[ ${COMP_WORDS[COMP_CWORD]} == = ]] && option=${COMP_WORDS[COMP_CWORD - 1]}
  COMPREPLY=()
  help=$("$1" --help 2>/dev/null) || return
  case $word in
    -*) words=$(sed -nE 's/^  (-[a-z], )?(--[a-z-]+).*/\2/p' <<<"$help") ;;
    *)
      if [[ $option == --set && $1 == *mlfab-run ]]; then
        words=$("$1" --settings | sed -nE '2,/^$/s/^([a-z_0-9]+) .*/\1=/p')
        compopt -o nospace
      elif [[ $option == --* ]]; then
        words=$(sed -nE "s/^  (-[a-z], )?$option ([a-z]+(\\|[a-z]+)+)( .*)?\$/\\2/p" <<<"$help")
        words=${words//|/ }
      fi
      ;;
  esac
  [[ -n $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _mlfab mlfab-run mlfab-plan mlfab-sim mlfab-top mlfab-fetch
